class Refused(Exception):
    def __init__(self, code):
        self.code = code

    def __str__(self):
        return "refused: " + self.code


raise Refused(403)
