from small import Small


class Chatty(Small):
    def loss(self, model, batch):
        print("a step")
        return super().loss(model, batch)
