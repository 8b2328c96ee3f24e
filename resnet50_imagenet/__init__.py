"""ResNet50, or any other classification model of flowvision, on ImageNet."""
