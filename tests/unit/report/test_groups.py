from importlib import resources

import pytest
from pydantic import TypeAdapter, ValidationError

from maect.core.errors import UserError
from maect.report.configs import Groups, group_names, group_numbers


def test_classes_of_imagenet_are_in_the_group_of_their_ancestor():
    timm = resources.files("timm.data") / "_info" / "imagenet_synsets.txt"
    classes = timm.read_text().split()
    numbers = dict(zip(classes, group_numbers("imagenet", classes, "ImageNet"), strict=True))
    names = group_names("imagenet")
    some = {"n01807496": "animals", "n07745940": "food", "n09472597": "nature",
            "n04310018": "vehicles", "n04379243": "household", "n03594734": "clothing",
            "n04532670": "structures", "n02787622": "devices"}  # fmt: skip
    assert {name: names[numbers[name]] for name in some if name in numbers} == {
        name: group for name, group in some.items() if name in numbers
    }
    assert names[numbers["n01440764"]] == "animals" and set(some.values()) == set(names)
    # All of the list are classes: none is counted that does not exist.
    assert sum(number >= 0 for number in numbers.values()) == 950


def test_groups_of_an_experiment():
    groups = {"even": ["0", "2"], "odd": ["1"]}
    assert group_numbers(groups, ["0", "1", "2", "3"], "here") == [0, 1, 0, -1]
    with pytest.raises(UserError, match="groups: here has no class '2'"):
        group_numbers(groups, ["0", "1"], "here")
    # A data set of some of ImageNet's classes has the list, too.
    assert group_numbers("imagenet", ["n07745940"], "here") == [1]


def test_a_class_is_in_one_group():
    with pytest.raises(ValidationError, match="class 'a' is in 'x' and in 'y'"):
        TypeAdapter(Groups).validate_python({"x": ["a"], "y": ["b", "a"]})
