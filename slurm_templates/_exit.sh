# Launchers swallow 75 (saved, run me again): torchrun makes 1 of it, or 0 where it restarts ranks, and srun 143, as it
# takes the first rank that ends with it for a failure and terminates the others. What the training said on disk comes
# first.
if grep -qs '"state": "stopped"' "$CKPTMAN_OUTCOME"; then
    code=75
fi
{% if spare_nodes | default(0) %}
# A node that died on the way, and one that was not needed, end with a code of their own.
if grep -qs '"state": "finished"' "$CKPTMAN_OUTCOME"; then
    code=0
fi
{% endif %}
exit "$code"
