"""`rloom view`: a web page over run directories. One process on 127.0.0.1, which writes nothing but labels of runs.

access      who may ask: the token, the cookie, the headers of a request
server      HTTP: GET and HEAD, the page's files, JSON
routes      address -> function
query       the parameters of an address, the JSON of a reply
run_cache   the runs that are shown, read as far as they are written
runs        JSON of runs: their list, configuration, metrics, stages, findings, comparison
labels      tags of a run, and whether the list hides it
prompts     JSON of prompts: those of a step, their answers, their history
validation  JSON of changes between two validations, of one run or of two
answers     JSON of all answers: search, distributions of score and length
page/       HTML, CSS and JavaScript
"""
