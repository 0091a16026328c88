def answer():
    return {"score": 1.0, "from": "helper"}
