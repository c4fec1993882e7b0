# Launchers swallow 75 (saved, run me again): torchrun makes 1 of it, and srun 143, as it takes the first rank that ends
# with it for a failure and terminates the others. What the training said on disk comes first.
if [ "$code" -ne 0 ] && grep -qs '"state": "stopped"' "$CKPTMAN_OUTCOME"; then
    code=75
fi
exit "$code"
