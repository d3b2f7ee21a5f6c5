"""Goal: messages are values, so that any of them can be carried, repeated and compared.

Method: every member of the message union is checked for the properties that transports rely on.
"""

import dataclasses
import typing

import pytest

from serving.nodes import messages


@pytest.mark.parametrize("kind", typing.get_args(messages.Message))
def test_message_is_a_frozen_dataclass_of_this_module(kind: type) -> None:
    assert dataclasses.is_dataclass(kind)
    assert kind.__dataclass_params__.frozen and kind.__dataclass_params__.eq  # type: ignore
    assert kind.__doc__ and kind.__module__ == messages.__name__


def test_every_dataclass_of_the_module_is_a_message() -> None:
    defined = {item for item in vars(messages).values() if dataclasses.is_dataclass(item)}
    foreign = {item for item in defined if item.__module__ != messages.__name__}
    assert defined - foreign == set(typing.get_args(messages.Message))
