#
#SBATCH --job-name=@job_name@
#SBATCH --account=@account@
#SBATCH --partition=@partition@
#SBATCH --qos=@qos@
#SBATCH --array=@array@
#SBATCH --nodes=@nodes@
#SBATCH --ntasks-per-node=@tasks_per_node@
#SBATCH --cpus-per-task=@cpus_per_task@
#SBATCH @gpus@
#SBATCH --mem=@mem@
#SBATCH @exclusive@
#SBATCH @no_kill@
#SBATCH --time=@time@
#SBATCH --signal=B:USR2@@warning_seconds@
#SBATCH --output=@log_folder@/@log_name@
#SBATCH --open-mode=append
#SBATCH @sbatch@
# B: only the batch script gets the warning: USR2 kills a task that does not handle it.
# append: otherwise a requeued job would empty its log.

# If this job was submitted from within another one, these are the other's. Set yours under "The environment".
unset MASTER_ADDR MASTER_PORT PET_RDZV_CONF PET_LOCAL_ADDR
