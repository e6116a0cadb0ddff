-- The watchdog's verdict on a node. ARGV: prefix, node, (name, value)*
for i = 3, #ARGV, 2 do redis.call('HSET', node_key(ARGV[2]), ARGV[i], ARGV[i + 1]) end
return 'OK'
