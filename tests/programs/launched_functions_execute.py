import sys

import nbformat
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], 4)
NotebookClient(notebook, timeout=float(sys.argv[2])).execute(cwd=".")
print("".join(each.get("text", "") for cell in notebook.cells for each in cell.get("outputs", ())))
