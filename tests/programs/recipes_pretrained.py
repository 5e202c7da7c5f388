import sys
from pathlib import Path

from finetune import FineTune

data, folder = map(Path, sys.argv[1:])
first = FineTune(data)
model = first.build_model()
model.save_pretrained(folder)
first.tokenizer.save_pretrained(folder)
again = FineTune(data, pretrained=folder, train_body=False)
loaded = again.build_model()
same = all((loaded.state_dict()[name] == value).all() for name, value in model.state_dict().items())
trained = [name for name, each in loaded.named_parameters() if each.requires_grad]
print("same", same, "trained", *trained)
