"""What a plan says to a user, and what would make its job faster. A job without a report imports nothing of this.

text.py      policy, placement, memory, bottleneck and totals of a prediction; tables of several; rates of a machine
links.py     attention workers: their links, and the prompts for which they pay
stagger.py   engines that share attention workers
whatif.py    changes of machine or weights that would help most
cluster.py   stages of a pipeline over several devices, and changes of the cluster that would help
picture.py   a prediction as PNG
"""
