@include rendezvous@
export OMP_NUM_THREADS=@cpus_per_task@

# torchrun passes SIGTERM on to its workers, and kills them 30 s later unless this says more: a save may take longer.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}"
@own_store@

@include debug@

@include flush@

@first_flush@

@first_node@
# --- The command ---
# is_host: the first node keeps the rendezvous. By itself torchrun compares host names, which may have several forms.
# USR1 and USR2 kill a torchrun that was not told to handle them, and its workers run on without it.
# A launcher that dies takes the others along, who would wait for it for ever; but not where nodes are to spare.
# The text in single quotes is for the shell on each node.
# shellcheck disable=SC2016
srun @step_options@ \
    sh -c @node_setup@ node \
    @container@ \
    @launcher@ \
    @max_restarts@ \
    --nnodes=@world_nodes@ --nproc-per-node=@tasks_per_node@ \
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" \
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2 \
    --no-python @command@
code=$?
@first_node_end@

flush_memory

@include exit@
