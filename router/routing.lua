-- SPDX-License-Identifier: Apache-2.0
-- The policy for loads that the proxy does not count itself: open conversations, and tokens.
--
-- The homes (and the sizes) live in stick tables, so they are shared with other routers and outlive a reload; here are
-- only sums, and what they are made of. An action counts what it decides at once; a task looks each home up again in turn,
-- which brings in what expired and where failed requests went, and looks for homes that other routers or the former worker
-- know. It does so in small pieces: while Lua runs nobody else decides. With an engine's metric the sums are the metric instead.
--
-- For requests in flight the configuration decides alone, and of this only await_home is used (with --router).

local options = os.getenv("TIDEPOOL_ROUTER") or error("TIDEPOOL_ROUTER is not set: load this from a configuration made by router/generate")
local load_kind, hundredths, sync_ms, source, metric, factor, explain, peers, node_list = table.unpack((function()
  local words = {}
  for word in options:gmatch("%S+") do words[#words + 1] = word end
  return words
end)())
explain = explain == "explain"
hundredths, sync_ms, factor = tonumber(hundredths), tonumber(sync_ms), tonumber(factor)

local nodes, by_id, by_name = {}, {}, {}
for name, id, address in node_list:gmatch("([^,=]+)=(%d+)=([^,]+)") do
  local node = {name = name, id = tonumber(id), address = address, load = 0}
  nodes[#nodes + 1], by_id[node.id], by_name[name] = node, node, node
end

local SYNC_SHARE = 20           -- counting may take 1/20 of one thread's time,
local LEARNING_SHARE = 1        -- or half of it while this worker does not know the homes yet
local LOOKUPS = 100             -- homes that are looked up before others may decide
local SLICE = 5000              -- the same where a table is read
local USABLE_FOR = 0.02         -- seconds; states of nodes are asked again after this
local LEARNING_TIME = 2         -- seconds from the worker's start in which homes may still arrive from the one before,
local LEARNING_MOST = 30        -- or up to this where they are so many that they still do
local ARRIVING = 1000           -- new homes in 50 ms are no requests: they are being told
local next_tie = 0
local usable_at = -1

local function now()
  local t = core.now()
  return t.sec + t.usec / 1e6
end

-- Homes may still arrive; and until they are all here and counted, sums say little: this worker decides, but moves nothing.
local arriving, learning = peers ~= "-", peers ~= "-"

local function home_table() return core.backends[load_kind == "requests" and "nodes" or "homes"].stktable end

local function watch_arrivals()
  local start, known, latest = now(), 0, now()
  repeat
    core.msleep(50)
    local used = home_table():info().used
    if used - known > ARRIVING then latest = now() end
    known = used
  until now() - start >= LEARNING_MOST or (now() - start >= LEARNING_TIME and now() - latest >= .5)
  arriving = false
end

if arriving then core.register_task(watch_arrivals) end

-- A conversation without a home may be one that the former worker knows: wait until it has told, while it may.
core.register_action("await_home", {"http-req"}, function(txn)
  while arriving do
    local entry = home_table():lookup(txn:get_var("txn.key"))
    if entry and (entry.server_id or entry.gpt0 or 0) ~= 0 then return end
    core.msleep(20)
  end
end, 0)

-- The same two questions as the configuration asks for requests in flight. The name stands alone on purpose: of
-- "backend/server" the proxy overwrites the slash inside Lua's own copy of the string, and the next call finds no server.
local function refresh_usable(txn)
  local t = now()
  if t - usable_at < USABLE_FOR and t >= usable_at then return end
  usable_at = t
  for _, node in ipairs(nodes) do
    local up = txn.f:srv_is_up(node.name)
    node.up = up == true or up == 1
    node.usable = node.up and (tonumber(txn.f:srv_weight(node.name)) or 0) > 0
  end
end

-- Equally loaded nodes take turns.
local function least_loaded(except)
  local best, n = nil, #nodes
  next_tie = next_tie % n + 1
  for i = 0, n - 1 do
    local node = nodes[(next_tie + i - 1) % n + 1]
    if node.usable and node ~= except and (not best or node.load < best.load) then best = node end
  end
  return best
end

local function is_over(load, total, count)
  return load * count * 100 > hundredths * total
end

-- What the sums are made of: {key: id of its node}, {key: what it weighs there}. `queue` holds each of the keys once.
local home_of, size_of, known, queue = {}, {}, 0, {}

local function count_home(key, id, size)
  local before, node = by_id[home_of[key]], by_id[id]
  if before then before.load = before.load - size_of[key] end
  if node then node.load = node.load + size end
  if home_of[key] == nil then
    known = known + 1
    queue[#queue + 1] = key
  end
  home_of[key], size_of[key] = id, size
end

local function decide(home_id, held, weight, keyed)
  if not keyed then return "unkeyed", least_loaded() end
  if home_id == 0 then return "new", least_loaded() end
  local home = by_id[home_id]
  if not home or not home.up then return "rehomed", least_loaded() end
  local total, count = 0, 0
  for _, node in ipairs(nodes) do
    if node.usable then total, count = total + node.load, count + 1 end
  end
  if not is_over(home.load, total, count) then return "stay", home end
  if learning then return "guarded", home end
  local best = least_loaded(home)
  local after = total + weight - (home.usable and held or 0)
  if not best or is_over(best.load + weight, after, count) then return "guarded", home end
  return "moved", best
end

core.register_action("route", {"http-req"}, function(txn)
  refresh_usable(txn)
  local key = txn:get_var("txn.key")
  local keyed = key ~= nil
  local home_id = txn:get_var("txn.home") or 0
  local held, weight = 0, 1
  if load_kind == "tokens" then
    held = txn:get_var("txn.held") or 0
    weight = tonumber(txn:get_var("txn.size")) or 0
    if source ~= "header" then weight = math.ceil(weight / (source == "bytes" and factor or 4)) end
    weight = math.max(1, math.min(math.floor(weight), 4294967295))
  elseif home_id ~= 0 then
    held = 1
  end
  local counts = keyed and source ~= "metric"
  if counts and home_id ~= 0 then
    count_home(key, home_id, held)              -- another router may have moved it
  elseif counts and home_of[key] then
    count_home(key, home_of[key], 0)            -- it has expired; its place in the queue stays
  end
  if explain then
    local loads = {}
    for i, node in ipairs(nodes) do loads[i] = string.format("%s=%d", node.name, node.load) end
    txn:set_var("txn.loads", table.concat(loads, " "))
  end
  local decision, node = decide(home_id, held, weight, keyed)
  txn:set_var("txn.decision", decision)
  txn:set_var("txn.weight", weight)
  txn:set_var("txn.held", held)
  if not node then return end
  txn:set_var("txn.node", node.name)
  txn:set_var("txn.node_id", node.id)
  if counts then
    count_home(key, node.id, weight)
  elseif source == "metric" then
    node.load = node.load + weight              -- until the metric says so
  end
end, 0)

core.register_fetches("node_load", function(txn, name)
  local node = by_name[name]
  return node and string.format("%d", node.load) or "0"
end)

-- Counts a home as the tables have it. Returns whether there is one.
local function look_up(key)
  local entry = home_table():lookup(key)
  if not entry then return false end
  if entry.gpt0 == 0 then return home_of[key] ~= nil end      -- it is being decided
  local size = 1
  if load_kind == "tokens" then
    local found = core.backends["sizes"].stktable:lookup(key)
    size = found and found.gpt0 or 0
  end
  if home_of[key] ~= entry.gpt0 or size_of[key] ~= size then count_home(key, entry.gpt0, size) end
  return true
end

-- Calls work and then lets others decide, for so long that it had its share of the time.
local function take_turns(work)
  local start = os.clock()
  work()
  core.msleep(math.max(1, math.ceil((os.clock() - start) * 1000 * (learning and LEARNING_SHARE or SYNC_SHARE))))
end

-- Calls visit for each key, some at a time.
local function for_each(keys, visit)
  local done = 0
  while done < #keys do
    take_turns(function()
      for i = done + 1, math.min(done + LOOKUPS, #keys) do visit(keys[i]) end
      done = done + LOOKUPS
    end)
  end
end

local function look_up_known()
  local round = queue
  queue = {}
  for_each(round, function(key)
    if look_up(key) then
      queue[#queue + 1] = key
    else
      count_home(key, home_of[key], 0)
      home_of[key], size_of[key], known = nil, nil, known - 1
    end
  end)
end

-- Ranges of ids, each with few enough homes if these are spread evenly over the nodes.
local function ranges(homes)
  local ids = {}
  for i, node in ipairs(nodes) do ids[i] = node.id end
  table.sort(ids)
  local wanted, found, first = math.max(1, math.min(#ids, math.ceil(homes / SLICE))), {}, 1
  for i = 1, wanted do
    local last = #ids * i // wanted
    found[i] = {{"gpt0", "ge", ids[first]}, {"gpt0", "le", ids[last]}}
    first = last + 1
  end
  return found
end

-- All that is not known yet, node after node; then counted in no order, so that the sums grow alike.
local function find_unknown()
  local found, keys = {}, {}
  for _, range in ipairs(ranges(home_table():info().used)) do
    take_turns(function()
      for key in pairs(home_table():dump(range)) do
        if home_of[key] == nil then found[key] = true end
      end
    end)
  end
  for key in pairs(found) do keys[#keys + 1] = key end
  for_each(keys, look_up)
end

-- What any router was asked a moment ago.
local function find_recent()
  local keys = {}
  take_turns(function()
    for key in pairs(home_table():dump({{"http_req_rate", "gt", 0}})) do keys[#keys + 1] = key end
  end)
  for_each(keys, look_up)
end

local function keep_counting()
  local early = 50              -- after a reload homes arrive from the former worker: look often at first
  while true do
    local all_here, used = not arriving, home_table():info().used
    if peers ~= "-" and (all_here or used < SLICE) and (learning or used > known * 1.02 + 100) then
      find_unknown()
      if all_here then learning = false end
    elseif peers == "several" then
      find_recent()
    end
    look_up_known()
    early = early - 1
    core.msleep(early > 0 and math.min(sync_ms, 100) or sync_ms)
  end
end

-- The sum over the lines of that name: an engine has one for each of its models or ranks.
local function metric_in(text)
  local sum, found = 0, false
  for line in text:gmatch("[^\n]+") do
    local name, value = line:match("^([%w_:]+)%b{}%s+(%S+)")
    if not name then name, value = line:match("^([%w_:]+)%s+(%S+)") end
    if name == metric and tonumber(value) then sum, found = sum + tonumber(value), true end
  end
  return found and sum * factor or nil
end

local function keep_asking(node)
  local url, complained = "http://" .. node.address .. "/metrics", false
  while true do
    local answer = core.httpclient():get{url = url, timeout = 2000}
    local value = answer and answer.status == 200 and answer.body and metric_in(answer.body)
    if value then
      node.load, complained = math.floor(value + 0.5), false
    else
      -- Unknown is neither idle nor full: the mean of the others.
      local sum, count = 0, 0
      for _, other in ipairs(nodes) do
        if other ~= node and other.usable then sum, count = sum + other.load, count + 1 end
      end
      if count > 0 then node.load = sum // count end
      if not complained then
        core.Warning(string.format("node %s: no metric %s at %s (status %s); its load is taken as the others' mean. Check --tokens metric:NAME",
                                   node.name, metric, url, tostring(answer and answer.status)))
        complained = true
      end
    end
    core.msleep(sync_ms)
  end
end

if load_kind == "requests" then return end

if source == "metric" then
  learning = false
  for _, node in ipairs(nodes) do core.register_task(function() keep_asking(node) end) end
else
  core.register_task(keep_counting)
end
