# --- The environment ---
# Your own lines go here, too.
@modules@
@venv@
@setup@
@env@
set -u  # from here on; scripts that activate environments rarely survive it
