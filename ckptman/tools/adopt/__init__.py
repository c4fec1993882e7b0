"""Make a checkpoint of plain DCP one of ckptman, where it is."""
