"""What proposes candidate tokens to a method.

- A *source* (`Source` in `base.py`) proposes tokens. It knows the text so far, but not where its
  tokens go in a tree: that is the method's choice. Most sources look tokens up and take no call:
  n-grams (`ngram.py`), the last logits (`last_logits.py`), earlier answers (`answers.py`),
  predicted texts (`prediction.py`), recycled tokens (`recycling.py`) and the model's own text
  (`own_text.py`).
- A *drafter* (`Drafter` in `base.py`) is a source that is asked in calls. It gives the distribution
  of the next token after any node of a tree. All other files are for drafters.
"""
