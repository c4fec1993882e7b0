"""What must hold on a GPU, as scenarios: `pytest -m gpu` runs them on a real one, without a network or another library.

Without `-m gpu`, those that take a `device` run on a pretended one (tests/helpers/fake_device.py): its streams are
threads, and memory that is freed is written over, so that a wait that is missing shows. The others are skipped then.
"""
