# ParaStation's psslurm runs the jobs here, in place of slurmd. Its source sets SLURMD_NODENAME and delivers signals to
# the batch script alone (--signal=B:, scancel --batch) and to the steps. This script has not been tried with it: before
# a long run, try `scancel --signal=USR2 --batch JOB`, and see whether the run saves.
