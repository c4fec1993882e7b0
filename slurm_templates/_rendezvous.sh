# --- Where the ranks meet, and when the job ends ---
# They meet at the first node of the job, at a port of the job's own: two jobs on one node do not mix.
if [ -z "${MASTER_ADDR:-}" ]; then
    MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1){{ master_suffix }}
fi
MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
export MASTER_ADDR MASTER_PORT
# Of several networks of a node the ranks may take one that leads nowhere (`ip -br addr` lists them). To say which:
# ckptman template ... --set interface=ib0, or here: export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0
{% if interface %}
export GLOO_SOCKET_IFNAME={{ interface }} NCCL_SOCKET_IFNAME={{ interface }}
{% endif %}

# When the job ends, for BeforeDeadline: Slurm 22.05 does not tell, and inside a container nobody can be asked.
if [ "${SLURM_JOB_END_TIME:-0}" -le "$(date +%s)" ]; then
    job=${SLURM_ARRAY_TASK_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
    end=$(SLURM_TIME_FORMAT=standard squeue -h -j "${job:-$SLURM_JOB_ID}" -o %e)
    case $end in
        # Anything else, such as NONE, is no time limit, and not what date makes of it.
        2*-*T*) SLURM_JOB_END_TIME=$(date -d "$end" +%s) && export SLURM_JOB_END_TIME ;;
    esac
fi

export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"  # since 22.05 srun no longer takes it from sbatch

# Where ckptman writes how the attempt ended; `ckptman submit` has said it already. A job that is requeued begins anew.
if [ -z "${CKPTMAN_OUTCOME:-}" ]; then
    CKPTMAN_OUTCOME=$(realpath -- {{ log_folder | shell }})/outcome-$SLURM_JOB_ID.json
    export CKPTMAN_OUTCOME
    rm -f -- "$CKPTMAN_OUTCOME"
fi
