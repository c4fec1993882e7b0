#!/bin/bash
{% block submit %}{% endblock %}
# Log:          {{ log_folder }}/{{ job_name }}-JOB.out
# Command:      {{ command | one_line }}
#
{% block remarks %}
# Every night, from Slurm's own cron: `scrontab -e`, and these lines. Options are read from there alone, not from below.
#
#     #SCRON --time={{ time | shell }} --cpus-per-task={{ cpus_per_task }} --output={{ name }}-%j.out --open-mode=append
#     30 {{ hour }} * * * cd FOLDER && bash FILE
#
# Where there is no scrontab, cron of a login node:   30 {{ hour }} * * * cd FOLDER && sbatch --quiet FILE
{% endblock %}
#
#SBATCH --job-name={{ job_name | sbatch }}
{% for name, value in [("account", account), ("partition", partition), ("qos", qos)] if value %}
#SBATCH --{{ name }}={{ value | sbatch }}
{% endfor %}
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task={{ cpus_per_task }}
{% if mem %}
#SBATCH --mem={{ mem }}
{% endif %}
#SBATCH --time={{ time | sbatch }}
#SBATCH --output={{ log_folder | sbatch }}/%x-%j.out
#SBATCH --open-mode=append
{% for option in sbatch %}
#SBATCH {{ option | sbatch }}
{% endfor %}
{% block signal %}
# No --signal: there is nothing to save.
{% endblock %}

{% include "_environment.sh" %}

if [ "${CKPTMAN_DEBUG:-0}" = 1 ]; then
    export PYTHONFAULTHANDLER=1  # a process that crashes leaves the stacks of its threads
fi

{% block command %}{% endblock %}
{{ command | words }}
exit $?
