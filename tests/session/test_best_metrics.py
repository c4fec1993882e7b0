import warnings

import pytest

import ckptman


def run(root, measured, saved=(), policy=10):
    """What is warned of, where a metric is given at some steps, and some are saved by hand."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        keeps = ckptman.KeepLast(2) | ckptman.KeepBest("val_loss")
        with ckptman.Checkpointer(root, {"n": 0}, save_policy=policy, retention=keeps, deadline=None) as checkpointer:
            for step in range(1, 40):
                metrics = {"loss": 1.0, **({"val_loss": 2.0} if step in measured else {})}
                checkpointer.step(step, metrics)
                if step in saved:
                    checkpointer.save(step, metrics)
    return [str(each.message) for each in told if "KeepBest" in str(each.message)]


@pytest.mark.parametrize(("measured", "saved"), [((), ()), ((10, 20), ()), ((7,), (7,)), ((5, 10, 15, 20), ())])
def test_a_metric_that_saves_have_is_no_news(tmp_path, measured, saved):
    assert run(tmp_path, measured, saved) == []


def test_a_metric_that_no_save_has_is_told_once(tmp_path):
    (told,) = run(tmp_path, (7, 14, 21, 28))
    assert "val_loss was given at step 7, which was not saved, and not at step 10, which is" in told
    assert "save(step, metrics)" in told
