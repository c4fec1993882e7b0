import gc
import pickle
import weakref

import pytest

from ckptman._tracebacks import raised_from, short_traceback
from ckptman.errors import BusyError, CkptmanError, CommitError, NotFoundError


class Opened:
    pass


@short_traceback
def fail(error):
    held = Opened()
    error.held = weakref.ref(held)
    try:
        raise OSError(28, "No space left on device")
    except OSError as raised:
        raise error from raised


@pytest.mark.parametrize(
    "error", [CommitError(3, 1, "OSError: full"), NotFoundError(2, "not there"), BusyError("/root", "host", 1, None)]
)
def test_what_it_was_raised_from_is_known_and_not_pickled(error):
    with pytest.raises(type(error)) as caught:
        fail(error)
    assert caught.value.__cause__ is None
    assert raised_from(caught.value)[0].errno == 28
    del error.held  # a weak reference does not pickle
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), str(error))
    assert raised_from(again) == (None, None)


def test_attributes_are_pickled_with_an_error():
    error = CkptmanError("text")
    error.failure = "of a rank"
    assert pickle.loads(pickle.dumps(error)).failure == "of a rank"


def test_an_error_that_was_handled_keeps_nothing_alive():
    try:
        fail(CkptmanError("text"))
    except CkptmanError as error:
        held = error.held
    gc.collect()
    assert held() is None


def test_an_error_of_the_user_is_asked_for_its_own_reason():
    error = ValueError("of the user")
    error.__cause__ = OSError(5, "Input/output error")
    assert raised_from(error)[0].errno == 5
