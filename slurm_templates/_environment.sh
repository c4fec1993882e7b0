# The environment that the training runs in; lines of yours go here.
@modules@
@venv@
@setup@
@env@
set -u  # from here on; what others wrote to activate environments rarely stands it
