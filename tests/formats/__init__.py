"""The table of docs/formats.md: checkpoints of every kind, resharded through the product, loaded by what people use.

python -m tests.formats                          runs every case and prints the table
python -m tests.formats llama t5                 runs these
python -m tests.formats --write docs/formats.md  runs every case and writes the table there
"""
