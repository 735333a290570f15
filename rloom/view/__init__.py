"""`rloom view`: a web page over run directories. One process on 127.0.0.1 that only reads.

access      who may ask: the token, the cookie, the headers of a request
server      HTTP: GET and HEAD, the page's files, JSON
routes      address -> function
query       the parameters of an address
opened      the runs that are shown, read as far as they are written
runs, metrics, stages, prompts, answers, validation, findings, comparison      the JSON, one file a subject
page/       HTML, CSS and JavaScript
"""
