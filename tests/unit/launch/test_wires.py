"""Messages and bytes between a launching process and its ranks."""

import os
import threading

from parallel_runtime.launch.wires import MessageReader, read_all, sealed, send_message


def test_every_reader_of_sealed_bytes_gets_all_of_them() -> None:
    data = os.urandom(300_000)
    fd = sealed(data)
    assert read_all(os.dup(fd)) == data
    assert read_all(fd) == data


def test_messages_bigger_than_a_pipe_arrive_in_order() -> None:
    read_fd, write_fd = os.pipe()
    reader = MessageReader(read_fd)
    sent = ["small", bytes(1_000_000), {"last": 1}]

    def write() -> None:
        for message in sent:
            send_message(write_fd, message)
        os.close(write_fd)

    thread = threading.Thread(target=write)
    thread.start()
    received: list[object] = []
    while reader.is_open:
        received += reader.read()
    thread.join()
    assert received == sent


def test_a_message_cut_off_by_death_is_not_a_message() -> None:
    read_fd, write_fd = os.pipe()
    reader = MessageReader(read_fd)
    os.write(write_fd, (100).to_bytes(8, "little") + b"only a part")
    assert reader.read() == []
    os.close(write_fd)
    assert reader.read() == []
    assert not reader.is_open
    reader.close()
