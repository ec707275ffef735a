-- id, key, target, priority, request, asked_by -> {id of the active job, 1 if it was there before, its key}
return { enqueue(ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6], now()) }
