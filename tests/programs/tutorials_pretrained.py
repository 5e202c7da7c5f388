import torch
import torchvision

weights = torchvision.models.resnet34().state_dict()  # 1000 classes, as the published ones
torch.save({f"module.{name}": tensor for name, tensor in weights.items()}, "r34.pth")  # saved from inside DDP
