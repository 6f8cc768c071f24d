"""`spmdkit bench communication`: the user's task under each way of adding gradients and of agreeing, trained in turns
and compared with `sum`.

In order: `choices` (what is compared), `opened` (their programs, or why there is none), `traffic` (bytes, from the
compiled programs), `turns` (training and the clock), `figures` (what a row says), `plot` (the PNG), `communication`
(the command).
"""
