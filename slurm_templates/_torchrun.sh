{% include "_rendezvous.sh" %}
export OMP_NUM_THREADS={{ cpus_per_task }}

# torchrun passes SIGTERM on to its workers, and kills them 30 s later unless this says more: a save may take longer.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}"
{% if restarts %}
# Ranks that are restarted meet in a store of their own each time. In torchrun's they would look for each other under a
# count of restarts, which differs from node to node.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
{% endif %}

{% include "_debug.sh" %}

{% include "_flush.sh" %}

{% if spare_nodes %}
# Queued again, torchrun may give the places to nodes that held nothing, and keep in reserve one that held a part.
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
    flush_memory
fi
{% endif %}

{% if restarts %}
{% include "_first_node.sh" %}

{% endif %}
# --- The command ---
# is_host: the first node keeps the rendezvous. By itself torchrun compares host names, which may have several forms.
# USR1 and USR2 kill a torchrun that was not told to handle them, and its workers run on without it.
# A launcher that dies takes the others along, who would wait for it for ever; but not where nodes are to spare.
# The text in single quotes is for the shell on each node.
# shellcheck disable=SC2016
srun {{ "--no-kill --kill-on-bad-exit=0 --wait=0" if spare_nodes else "--kill-on-bad-exit=1" }} \
    sh -c 'case ",${PET_RDZV_CONF:-}" in *,is_host=*) ;; *) PET_RDZV_CONF="${PET_RDZV_CONF:+$PET_RDZV_CONF,}is_host=$((SLURM_NODEID == 0))" ;; esac; export PET_RDZV_CONF
        {%- if master_suffix %}; export PET_LOCAL_ADDR="${PET_LOCAL_ADDR:-$(hostname -s){{ master_suffix }}}"{% endif %}; exec "$@"' node \
    {% if container %}
    {{ container }} \
    {% endif %}
    {{ "python -m ckptman.train.torchrun" if spare_nodes else "torchrun" }} \
    {% if restarts %}
    --max-restarts={{ restarts }} \
    {% endif %}
    --nnodes={{ nodes if spare_nodes else '"$SLURM_JOB_NUM_NODES"' }} --nproc-per-node={{ keys.tasks }} \
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" \
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2 \
    --no-python {{ command | words }}
code=$?
{% if restarts %}
kill "$watch" 2> /dev/null
wait "$watch" 2> /dev/null
{% endif %}

flush_memory

{% include "_exit.sh" %}
