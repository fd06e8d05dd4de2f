"""What travels between the processes of vcpipe, and the words for it. numpy and msgpack only."""
