-- id of a job that cannot be read because a client wrote over its record: it holds up no other
if not readable(ARGV[1]) then drop(ARGV[1], 'due', 'waked', 'left') end
