"""Image folders, with classes and without."""

from collections.abc import Sequence

from maect.data.sources.base import (
    UNLABELLED,
    Entry,
    ImageSource,
    Listing,
    class_folders,
    list_classes,
    walk_images,
)


class Folder(ImageSource):
    """Labels number the class folders in the order of their names."""

    kind = "folder"
    about = "CLASS/IMAGE, at any depth below CLASS"

    def list_images(self) -> Listing:
        """Images class by class."""
        names = class_folders(self.path)
        return list_classes(self.path, [(name, i) for i, name in enumerate(names)], names)

    def known_classes(self) -> Sequence[str] | None:
        """The class folders, where they are."""
        return class_folders(self.path) if self.path.is_dir() else None


class Unlabelled(ImageSource):
    """Images without labels."""

    kind = "unlabelled"
    about = "images at any depth"

    def list_images(self) -> Listing:
        """All images."""
        files = [*walk_images(self.path)]
        entries = [Entry(name, UNLABELLED, name) for name, is_image in files if is_image]
        return Listing(entries, [], [name for name, is_image in files if not is_image])
