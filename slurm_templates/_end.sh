# --- After the command ---
@include flush@
flush_memory

@include exit@
