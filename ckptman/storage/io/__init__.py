"""Bytes: durable file operations, reading and writing ranges of files, digests, threads and processes."""
