# A run that hangs or dies without a word:  CKPTMAN_DEBUG=1 ckptman submit FILE
if [ "${CKPTMAN_DEBUG:-0}" = 1 ]; then
    export PYTHONFAULTHANDLER=1                        # a process that crashes leaves the stacks of its threads
    export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET  # who talks to whom, over what; RCCL reads the same names
    export TORCH_DISTRIBUTED_DEBUG=INFO                # DETAIL also compares each collective of all ranks, slowly
    export TORCH_CPP_LOG_LEVEL=INFO
    # The flight recorder: after a timeout of NCCL each rank writes its last collectives. Two names, old and new torch.
    export TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_TRACE_BUFFER_SIZE=2000
    export TORCH_NCCL_DUMP_ON_TIMEOUT=1
    trace={{ log_folder | shell }}/nccl-trace-$SLURM_JOB_ID-rank-
    export TORCH_FR_DUMP_TEMP_FILE="$trace" TORCH_NCCL_DEBUG_INFO_TEMP_FILE="$trace"
fi
