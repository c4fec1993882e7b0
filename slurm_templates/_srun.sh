# --- The command ---
# No trap: `ckptman submit` warns the tasks. A rank that dies takes the others along; they would wait for it for ever.
# Text in single quotes, if any, is for another shell, such as the one inside the container.
# shellcheck disable=SC2016
srun --kill-on-bad-exit=1 \
    {% if cpu_masks | default("") %}
    --cpu-bind=mask_cpu:{{ cpu_masks }} \
    {% endif %}
    {% if container %}
    {{ container }} \
    {% endif %}
    {{ command | words }}
code=$?
