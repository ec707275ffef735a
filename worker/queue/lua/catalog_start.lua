-- name, run, definition -> 'started' | 'busy'
return catalog_start(ARGV[1], ARGV[2], ARGV[3], now())
