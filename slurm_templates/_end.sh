# --- After the command ---
{% include "_flush.sh" %}
flush_memory

{% include "_exit.sh" %}
