# --- The environment ---
# Your own lines go here, too.
{% if modules.split() %}
module load {{ modules.split() | map("shell") | join(" ") }} || exit 2
{% endif %}
{% if venv and not container | default("") %}
source {{ (venv ~ "/bin/activate") | expand }} || exit 2
{% endif %}
{% if setup | join("\n") %}
{{ setup | join("\n") }}
{% endif %}
{% for name, value in env.items() %}
export {{ name }}={{ value | expand }}
{% endfor %}
set -u  # from here on; scripts that activate environments rarely survive it
