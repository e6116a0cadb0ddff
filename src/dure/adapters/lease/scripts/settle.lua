-- The end of this lease is recorded: never tell of it again. ARGV: prefix, (id, epoch)*
for i = 2, #ARGV, 2 do
  local k = task(ARGV[i])
  local f = redis.call('HMGET', k, 'issued_epoch', 'freed_at')
  if f[1] == ARGV[i + 1] and f[2] then
    redis.call('ZREM', CHANGED, ARGV[i])
    redis.call('PEXPIRE', k, KEEP_MS)
  end
end
return 'OK'
