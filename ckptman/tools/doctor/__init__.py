"""Whether a mount keeps what saves build on, and what is around a job: `ckptman doctor`. No torch."""
