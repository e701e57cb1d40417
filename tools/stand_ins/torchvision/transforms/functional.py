"""The names that Streaming imports."""


def to_tensor(picture: object) -> object:
    raise NotImplementedError("this is no torchvision")
