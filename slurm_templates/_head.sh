#
# Submit:       ckptman submit FILE   job after job until the training is finished; passes the warning on to the tasks
#               sbatch --signal=TERM@{{ warning_seconds }} FILE   one job; Slurm warns the tasks. Exit code 75: submit again
# Log:          {{ log_folder }}/{{ job_name }}-JOB.out
# Checkpoints:  {{ command | checkpoints | one_line }}
# Command:      {{ command | one_line }}
#               srun starts it below, under "The command", in what "The environment" sets up.
