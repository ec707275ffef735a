-- night, 1 if the window is shut -> 1 if no bulk work is to be begun
return (paused() or bulk_closed(ARGV[1], ARGV[2])) and 1 or 0
