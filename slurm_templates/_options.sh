#
#SBATCH --job-name={{ job_name | sbatch }}
{% for name, value in [("account", account), ("partition", partition), ("qos", qos), ("array", array | default(""))] if value %}
#SBATCH --{{ name }}={{ value | sbatch }}
{% endfor %}
#SBATCH --nodes={{ size.nodes }}
#SBATCH --ntasks-per-node={{ size.tasks }}
#SBATCH --cpus-per-task={{ size.cpus }}
{% if size.gpus %}
#SBATCH {{ gpus_option | default("--gres=gpu:") }}{{ gpu_type ~ ":" if gpu_type else "" }}{{ size.gpus }}
{% endif %}
{% if mem %}
#SBATCH --mem={{ mem }}
{% endif %}
{% if exclusive %}
#SBATCH --exclusive
{% endif %}
{% if restarts | default(0) %}
#SBATCH --no-kill
{% endif %}
#SBATCH --time={{ time | sbatch }}
#SBATCH --signal=B:USR2@{{ warning_seconds }}
#SBATCH --output={{ log_folder | sbatch }}/{{ log_name | default("%x-%j.out") }}
#SBATCH --open-mode=append
{% for option in sbatch %}
#SBATCH {{ option | sbatch }}
{% endfor %}
# B: only the batch script gets the warning: USR2 kills a task that does not handle it.
# append: otherwise a requeued job would empty its log.

# If this job was submitted from within another one, these are the other's. Set yours under "The environment".
unset MASTER_ADDR MASTER_PORT PET_RDZV_CONF PET_LOCAL_ADDR
