# A training that ended without a save may have left newer checkpoints in the memory of its nodes: bring them to disk,
# on the nodes that are left, in at most 10 minutes. What comes of it is in the log, and changes no exit code.
flush_memory() (
    root=$(sed -n 's/^ *"root": "\(.*\)",$/\1/p' "$CKPTMAN_OUTCOME" 2> /dev/null)
    if [ -z "$root" ] || grep -qsE '"state": "(stopped|finished)"' "$CKPTMAN_OUTCOME"; then
        return
    fi
    # A node that is gone is still in the variables of the job, and may still be among its nodes.
    nodes=$(squeue -h -j "$SLURM_JOB_ID" -o %N)
    nodes=$(sinfo -h -N -n "$nodes" -o '%N %t' | grep -v '[*]\|down' | cut -d' ' -f1 | sort -u)
    unset SLURM_JOB_NUM_NODES SLURM_NNODES SLURM_NTASKS SLURM_NPROCS SLURM_TASKS_PER_NODE
    # What is in single quotes is for the shell of the other side.
    # shellcheck disable=SC2016
    timeout 600 srun --overlap --no-kill --kill-on-bad-exit=0 --nodelist="$(echo "$nodes" | paste -sd,)" \
        --nodes="$(echo "$nodes" | wc -l)" --ntasks-per-node=1 --cpus-per-task=1 --gres=none \
        {% if container %}
        {{ container }} \
        {% endif %}
        sh -c 'test ! -d "/dev/shm/ckptman-$(id -u)" || exec ckptman memory flush "$1"' flush "$(printf %b "$root")"
)
