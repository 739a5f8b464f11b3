import pickle

import pytest

from ckptsync import errors


def all_errors():
    return [getattr(errors, name) for name in errors.__all__]


def test_every_error_is_exported_once_and_has_its_own_kind():
    defined = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert sorted(errors.__all__) == errors.__all__
    assert set(errors.__all__) == defined
    assert len({error.kind for error in all_errors()}) == len(errors.__all__)


@pytest.mark.parametrize("error", all_errors(), ids=lambda e: e.__name__)
def test_an_error_survives_a_pipe_between_ranks(error):
    copy = pickle.loads(pickle.dumps(error("shard 3 of v7 is cut short")))
    assert type(copy) is error
    assert str(copy) == "shard 3 of v7 is cut short"
    assert copy.kind == error.kind


def test_handlers_may_catch_the_builtin_kinds():
    assert issubclass(errors.InvalidInput, ValueError)
    assert issubclass(errors.NotFound, LookupError)
    assert issubclass(errors.StoreError, OSError)
    assert errors.StoreFull.kind == "store-full"


def test_the_tree_in_the_docstring_names_every_error():
    missing = [name for name in errors.__all__ if name not in (errors.__doc__ or "")]
    assert missing == []
