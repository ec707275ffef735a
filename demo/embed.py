"""Loads a model from the Hub as anyone would, and prints a sentence's embedding: `python embed.py REPO SENTENCE`.

One line of JSON: the embedding's raw bytes in hex, and its first numbers for people.
"""

import json
import sys

import torch
from transformers import AutoModel, AutoTokenizer

NUMBERS_SHOWN = 4


def embedding(repo: str, sentence: str) -> torch.Tensor:
    """The mean of the token vectors, scaled to length 1, as the model's card says; float32[384]."""
    tokenizer = AutoTokenizer.from_pretrained(repo)
    model = AutoModel.from_pretrained(repo).eval()
    inputs = tokenizer(sentence, return_tensors="pt")
    with torch.no_grad():
        tokens = model(**inputs).last_hidden_state[0]
    return torch.nn.functional.normalize(tokens.mean(dim=0), dim=0)


if __name__ == "__main__":
    vector = embedding(*sys.argv[1:3])
    sys.stdout.write(
        json.dumps({"bytes": vector.numpy().tobytes().hex(), "numbers": vector[:NUMBERS_SHOWN].tolist()}) + "\n"
    )
