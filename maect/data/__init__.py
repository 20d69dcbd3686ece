"""Images, from their source to a training batch."""


def shard_name(split: str, number: int) -> str:
    """File name of a shard."""
    return f"{split}-{number:06d}.tar"
