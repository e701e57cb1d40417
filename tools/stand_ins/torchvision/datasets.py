"""The names that Streaming imports."""


class VisionDataset: ...


class CIFAR10: ...
