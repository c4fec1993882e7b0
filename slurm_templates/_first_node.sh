# With --no-kill a job whose first node dies is left without its batch script, and would stand until its time limit. So
# the nodes look in turn, one of them every 15 seconds, whether Slurm still counts the first one among those of the job.
# If not, the job is queued again, or where that is not allowed it ends: a chain goes on with its next attempt.
# What is in single quotes is for the shell over there.
# shellcheck disable=SC2016
srun --overlap --no-kill --kill-on-bad-exit=0 --wait=0 --mem=0 --gres=none --ntasks-per-node=1 --cpus-per-task=1 sh -c '
    trap "" TERM
    sleep "$((15 * SLURM_NODEID))"
    while counted=$(squeue -h -j "$SLURM_JOB_ID" -w "$1" -o %i) || counted=unknown; do
        [ -n "$counted" ] || scontrol requeue "$SLURM_JOB_ID" || scancel "$SLURM_JOB_ID"
        sleep "$((15 * SLURM_NNODES))"
    done' watch "$SLURMD_NODENAME" &
watch=$!
