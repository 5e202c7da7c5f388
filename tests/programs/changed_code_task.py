from small import Small
from version import VERSION


class Edited(Small):
    def build_model(self):
        with open("versions.txt", "a") as file:
            file.write(f"{VERSION}\n")
        return super().build_model()
