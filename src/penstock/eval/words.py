"""The vocabulary of the recall model: keys, values, filler, digits and a few marks, one id and one word each.

The training script, the tokenizer that ships with the model and `penstock eval` share it, so it knows neither
torch nor a tokenizer library. A text is its words with a blank between them.
"""

NUM_KEYS = 1024
NUM_VALUES = 1024
NUM_FILLERS = 64
KEY, VALUE = 0, NUM_KEYS  # the first id of each kind
FILLER = VALUE + NUM_VALUES
DIGIT = FILLER + NUM_FILLERS
MARKS = ("recall", "chain", "sum", "|", "<end>", "<unk>")
RECALL, CHAIN, SUM, BAR, END, UNKNOWN = range(DIGIT + 10, DIGIT + 10 + len(MARKS))
VOCAB = DIGIT + 10 + len(MARKS)


def words() -> list[str]:
    """The word of each id."""
    return [
        *(f"k{i}" for i in range(NUM_KEYS)),
        *(f"v{i}" for i in range(NUM_VALUES)),
        *(f"f{i}" for i in range(NUM_FILLERS)),
        *(str(i) for i in range(10)),
        *MARKS,
    ]
